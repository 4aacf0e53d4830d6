"""The throughput sweep: systems x models x workloads x memory budgets. Started by
bench/throughput_sweep.sh."""
