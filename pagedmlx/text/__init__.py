"""Text in, text out: tokenizers, chat templates and the incremental detokenizer; no model code."""
