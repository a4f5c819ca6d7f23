"""What a finding means on the models that are the targets."""
