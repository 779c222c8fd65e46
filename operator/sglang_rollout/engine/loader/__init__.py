"""What the weight loader does inside the engine: finds the stage, proves that the model can take it, and loads it."""
