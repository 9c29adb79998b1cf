"""Parts of the chat's screen."""
