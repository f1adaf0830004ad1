"""Exports of a layout to Paceline, torchtitan and Megatron-LM."""
