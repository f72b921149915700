"""Text to batches: files to documents, documents to tokens, tokens to shuffled batches."""
