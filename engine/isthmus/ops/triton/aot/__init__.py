"""The Triton kernels without a device: what production launches, compiled ahead of time and looked at.

`recording` stands in for driver and compiler: the host's code runs, and its launches are kept (`driver`, `record`).
`workloads` are steps of that code, one list for every architecture. `build` compiles what they launch, in processes,
through the JIT's own door; `figures` reads registers, shared memory and instructions out of the result; `gates` says
what is not acceptable, but for `waivers`; `store` and `page` keep the figures and show them.

Nothing here imports torch or triton before it is used. Not for a process that interprets kernels.
"""
