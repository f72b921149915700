"""Records of runs, and what is drawn from them alone: tables, figures, the report."""
