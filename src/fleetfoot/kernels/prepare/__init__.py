"""Model Runner V2 prepares the inputs of a step on the device, and updates the state of its rows there.

`tables` has the structs of tensors that all operations take, `reference` the operations in torch and what they mean,
`triton_kernels` and `native` the faster implementations. Outputs are written in place, because graphs need fixed
addresses; counts are read from shapes and from device memory, never by the host.
"""
