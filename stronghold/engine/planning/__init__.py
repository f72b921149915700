"""What a model takes and how long it takes, before anything is placed: the planner asked about an nn.Module."""
