"""How a rollout is shown: reports, timelines, the live table and JUnit."""
