"""Verification of distributed programs that were written elsewhere, against their original model"""
