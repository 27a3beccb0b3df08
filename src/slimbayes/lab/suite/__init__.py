"""A suite of unlike networks and data sets: every method's defaults beside the plain network and what else there is."""
