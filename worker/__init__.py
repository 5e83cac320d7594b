"""One engine: page table, scheduler, runner, attention, sampling, offload."""
