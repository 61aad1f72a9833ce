"""Views of a rollout: reports, timelines, the page and JUnit."""
