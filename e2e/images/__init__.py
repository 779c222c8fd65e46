"""The images of this project: what they are made from, their names, and building them where the cluster finds them."""
