"""What trains, measures and reproduces with the library: commands, models, methods, data, records, the paper's cases.

The library imports nothing of it. It needs more packages: ``pip install '.[lab]'`` in the project's root. Each
module's names without an underscore are public here; of the library itself those of ``stronghold`` are.
"""
