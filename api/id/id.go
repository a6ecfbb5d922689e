// Package id makes and checks the identifiers that cross our borders. They are safe in host names, paths and URLs.
package id

import (
	"crypto/rand"
	"encoding/hex"
)

const alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"

// NewSandbox returns a sandbox id: "i" and 20 characters of [a-z0-9] (about 103 random bits).
func NewSandbox() string { return random('i') }

// NewSnapshot returns a snapshot id: "s" and 20 such characters. It has the form of a sandbox id.
func NewSnapshot() string { return random('s') }

func random(first byte) string {
	var raw [20]byte
	out := []byte{first}
	for len(out) < 21 {
		rand.Read(raw[:]) // never fails (crypto/rand documentation, Go 1.24)
		for _, b := range raw {
			// 252 is the largest multiple of 36 below 256: a uniform draw.
			if b < 252 && len(out) < 21 {
				out = append(out, alphabet[b%36])
			}
		}
	}
	return string(out)
}

// ValidSandbox reports whether s could be a sandbox id: 1 to 64 characters of [a-z0-9]. Never "-" or ".", since host names
// are split at them (E2B proxy rule).
func ValidSandbox(s string) bool {
	if len(s) == 0 || len(s) > 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// NewAPIKey returns a key of the form SDKs check: "e2b_" and 40 hex digits.
func NewAPIKey() string { return "e2b_" + randomHex(20) }

// NewToken returns an opaque per-sandbox access token of 64 hex digits.
func NewToken() string { return randomHex(32) }

func randomHex(n int) string {
	raw := make([]byte, n)
	rand.Read(raw)
	return hex.EncodeToString(raw)
}
