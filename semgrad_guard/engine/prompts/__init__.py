"""From a conversation to token ids: chat templates, the semantic token t*, tools and grammars."""
