"""Plain networks that the library itself builds: those of its estimators."""
