"""The reference model, and models that come from files; neither knows of offloading."""
