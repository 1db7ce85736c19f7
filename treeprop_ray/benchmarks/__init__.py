"""The benchmarks behind `python -m treeprop_ray.bench NAME`."""
