"""The evaluation's five cases: what belongs to each, its runs, its table and its figure."""
