"""What LDN's diffusion learnt, in pictures: its kernels, and how far they reach in the end."""
