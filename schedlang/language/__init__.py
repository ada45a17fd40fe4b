"""The language as text and values: grammar, syntax tree, printer, selectors, arguments."""
