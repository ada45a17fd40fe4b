"""What editors need of the language: colours, findings, completion, hovers, definitions."""
