"""What else trains these adapters, each written as its own users would run it: see docs/contributors/benchmarks.md."""
