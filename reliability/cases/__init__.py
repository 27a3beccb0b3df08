"""Generated cases: networks, methods, inputs and calls, each held against a reference or a documented refusal."""
