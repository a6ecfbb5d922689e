package template

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"strings"
)

// built is the digest of a template that was built after a recipe. No two builds make the same memory, and what is saved of a
// sandbox builds on the very pages of one: so each build has a number.
func built(recipe string) string {
	number := make([]byte, 8)
	_, _ = rand.Read(number) // never fails
	return recipe + "." + hex.EncodeToString(number)
}

// recipe is the part of a template's digest that says how it was made.
func recipe(digest string) string {
	r, _, _ := strings.Cut(digest, ".")
	return r
}

func fileSum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
