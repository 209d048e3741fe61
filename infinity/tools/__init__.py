"""The `infinity` command, one folder a subcommand. Nothing outside imports it."""
