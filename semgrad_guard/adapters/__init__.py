"""What the doors to other frameworks share: loading a model by its settings, call options, records in traces."""
