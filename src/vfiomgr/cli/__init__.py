"""What all commands are made of: options, output, tables, lists and reports."""
