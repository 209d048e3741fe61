"""Parameters at rest, and every tensor of them that a user holds."""
