"""The elementwise work between the matmuls as Triton kernels, one file a family; `operations.py` chooses them.

Each file holds its kernels, the operators around them (which torch.compile takes as they are, and a CUDA graph
captures) and their gradients. Importing a file needs triton; this package itself does not.

Bytes in the docstrings are those that cross the memory bus, with E bytes an element; times are for bfloat16 at
3.0 TB/s, what an H100's memory sustains, and for one layer of llama2-1.36b with 16,384 tokens (hidden 2304,
intermediate 6144, 18 heads of 128).
"""
