"""A load client for any server with OpenAI's HTTP interface: `runtime bench`.

Owns workloads, pacing and what is measured from outside. Shares nothing with the server but the protocol. Flags and
figures have the names of `vllm bench serve` where it has them.
"""
