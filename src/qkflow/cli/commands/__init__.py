"""One module a subcommand; `qkflow.cli.main` holds the table."""
