package files

import (
	"net/url"
	"strings"
)

// partFile reads a part's Content-Disposition: its form name, and its file name in full. The standard library keeps only
// the last element of a file name, but clients put the destination path there. Clients also differ in how they quote:
// browsers and undici send UTF-8 and escape only `"`, CR and LF, as %22, %0D and %0A; others escape with backslashes,
// do not quote, or send the extended form filename*=UTF-8”….
func partFile(disposition string) (name, filename string) {
	extended := false
	_, rest, _ := strings.Cut(disposition, ";")
	for rest != "" {
		var key, value string
		var quoted bool
		key, value, quoted, rest = nextParameter(rest)
		switch key {
		case "name":
			name = value
		case "filename":
			if !extended {
				filename = browserEscapes.Replace(value)
			}
			if !quoted && !extended {
				filename = unescape(filename)
			}
		case "filename*":
			if _, encoded, ok := strings.Cut(value, "''"); ok {
				filename, extended = unescape(encoded), true
			}
		}
	}
	return name, filename
}

var browserEscapes = strings.NewReplacer("%22", `"`, "%0D", "\r", "%0d", "\r", "%0A", "\n", "%0a", "\n")

// unescape undoes percent escapes, or leaves the text as it is where they are no escapes.
func unescape(s string) string {
	if plain, err := url.PathUnescape(s); err == nil {
		return plain
	}
	return s
}

// nextParameter takes `key=value` off s, up to and including the next semicolon outside of quotes.
func nextParameter(s string) (key, value string, quoted bool, rest string) {
	end := strings.IndexAny(s, "=;")
	if end < 0 || s[end] == ';' {
		_, rest, _ = strings.Cut(s, ";")
		return "", "", false, rest
	}
	key = strings.ToLower(strings.TrimSpace(s[:end]))
	s = strings.TrimLeft(s[end+1:], " \t")
	if !strings.HasPrefix(s, `"`) {
		value, rest, _ = strings.Cut(s, ";")
		return key, strings.TrimSpace(value), false, rest
	}
	var text strings.Builder
	i := 1
	for ; i < len(s) && s[i] != '"'; i++ {
		if s[i] == '\\' && i+1 < len(s) && (s[i+1] == '"' || s[i+1] == '\\') {
			i++
		}
		text.WriteByte(s[i])
	}
	_, rest, _ = strings.Cut(s[min(i, len(s)):], ";")
	return key, text.String(), true, rest
}
