"""Functions of tensors, without parameters: one folder, or file, per op."""
