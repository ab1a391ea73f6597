"""Reference pages of the commands, manual pages and the JSON reference, from one source."""
