"""How Model Runner V2 makes a step's inputs on the device, one op per file.

Each module has the op's twin for a CPU, its Triton kernel, and the function that picks one of the two by where the
tensors are. There are R rows of state, n requests in the batch and T tokens (both maybe padded to a captured graph's
size), and B blocks per row. All tensors are int32 and contiguous unless said otherwise. Outputs are written in place,
since graphs need fixed addresses; counts are read from shapes and from device memory, never by the host. A request that
pads the batch has ``idx_mapping[b] == -1``; a token that pads it has ``batch_index[t] == -1``, position 0, slot -1 and
input id 0.

The twins work through numpy views of the tensors: at the sizes of a decode step, a call of numpy costs about a third of
one of torch.
"""
