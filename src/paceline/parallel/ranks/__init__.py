"""Rank placement, launch, rendezvous and collectives."""
