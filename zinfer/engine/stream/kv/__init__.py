"""KV caches in host memory: what stores them (`store`), crosses the link (`link`), and attends on the CPU (`cpu`)."""
