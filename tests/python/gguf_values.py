"""Reads GGUF files with the package gguf and prints, for each file and tensor, what a reader must agree on: a line with
file, tensor, type, dimensions (contiguous one first), and the SHA-256 of its values in f32, little endian, with 0 for
both zeros."""

import hashlib
import sys

import gguf
import numpy as np

for path in sys.argv[1:]:
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype("<f4") + np.float32(0)
        dims = ",".join(str(int(dim)) for dim in tensor.shape)
        assert values.size == tensor.n_elements, (path, tensor.name)
        print(path, tensor.name, tensor.tensor_type.name, dims, hashlib.sha256(values.tobytes()).hexdigest())
