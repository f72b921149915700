"""What a checkpoint's directory holds: the manifest, and the files that it names, read with their checksums."""
