"""One class per torch operation, none per method."""
