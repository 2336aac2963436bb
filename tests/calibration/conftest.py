"""Property tests here are judged by their outcome, not by how busy the machine is."""

from hypothesis import settings

settings.register_profile("decision", deadline=None)
settings.load_profile("decision")
