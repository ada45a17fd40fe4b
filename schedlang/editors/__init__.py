"""Services for editors: colours, findings, completion, hovers, definitions."""
