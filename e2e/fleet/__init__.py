"""Tests on a real cluster, with real engines and the real router. They ask what clients, trainers and people see."""
