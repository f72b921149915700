"""Plans on paper, without torch and without devices: pipeline stages, their order and time, bytes on links."""
