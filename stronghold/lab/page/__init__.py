"""Results as one self-contained HTML page."""
