"""Reads and writes published weights of video networks, in all their forms.

The code is the same for all networks; what differs is data (`video.networks.published`).
"""
