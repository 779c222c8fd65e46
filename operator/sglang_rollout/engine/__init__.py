"""What runs in the engine's container. Standard library only (and SGLang itself in `serve`): the image is not ours."""
