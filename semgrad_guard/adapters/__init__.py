"""What the integrations share: loading a model by its settings, call options, records in traces."""
