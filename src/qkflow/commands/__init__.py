"""One module a subcommand; `qkflow.cli` holds the table."""
