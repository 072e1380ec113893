"""The events that TensorBoard shows, written from statistics, errors of formats and scalars."""
